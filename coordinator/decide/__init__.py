"""Pure decisions: observations are folded into a snapshot, a plan is made from the snapshot."""
