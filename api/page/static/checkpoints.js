// The checkpoints of a job: a view of its own, as a store may be slow, brought here when there are new ones.
import { renewFrom, together } from "./live.js";

const job = document.getElementById("head").dataset.job;
const load = () => renewFrom(`/ui/jobs/${encodeURIComponent(job)}/checkpoints`, ["checkpoints"]);
const newest = document.querySelector("#head [data-text=checkpoint]");

new MutationObserver(together(load, 5000)).observe(newest, { childList: true, characterData: true, subtree: true });
load();
