// What waits, what holds the slots, and the hosts: rendered anew when jobs change.
import { follow, keys, renew, together } from "./live.js";

follow("/jobs/summaries/stream", { summary: together(() => renew("checks", "queue", "holding", "hosts"), 2000) });
keys("#queue tbody tr, #holding tbody tr");
