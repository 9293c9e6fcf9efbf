// The list of jobs.
import { follow, keys, renew, show, together } from "./live.js";

const jobs = new Map();
const renewList = together(() => renew("jobs"), 300);

follow("/jobs/summaries/stream", {
  summary(content) {
    for (const [id, changed] of Object.entries(content.jobs ?? {})) {
      const view = { ...jobs.get(id), ...changed };
      jobs.set(id, view);
      const row = document.querySelector(`[data-job="${CSS.escape(id)}"]`);
      if (row) show(row, view);
      else if (!location.search) renewList(); // a new job; a filter may hide it
    }
    if (content.left?.length) renewList();
  },
});
keys("#jobs tbody tr");
