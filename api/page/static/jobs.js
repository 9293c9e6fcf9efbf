// The list of jobs.
import { follow, keys, renew, show, together } from "./live.js";

const jobs = new Map();
const renewList = together(async () => {
  const chosen = [...document.querySelectorAll("#jobs :checked")].map((box) => box.value); // to be compared
  await renew("jobs");
  for (const box of document.querySelectorAll("#jobs [name=job]")) box.checked = chosen.includes(box.value);
}, 300);

follow("/jobs/summaries/stream", {
  summary(content) {
    if (content.now) jobs.clear(); // the whole state follows
    for (const [id, changed] of Object.entries(content.jobs ?? {})) {
      const isNew = !jobs.has(id), view = { ...jobs.get(id), ...changed };
      jobs.set(id, view);
      const row = document.querySelector(`[data-job="${CSS.escape(id)}"]`);
      if (row) show(row, view);
      else if (isNew && !location.search) renewList(); // a filter may hide it
    }
    for (const id of content.left ?? []) jobs.delete(id); // it is over, and was shown as that
  },
});
keys("#jobs tbody tr");
