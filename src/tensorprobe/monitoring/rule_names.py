"""The names of the rules, and what each looks for. docs/monitor.md has the same table."""

from __future__ import annotations

# In the order in which alarms of one step are told.
RULE_NAMES: dict[str, str] = {
    "nonfinite": "NaN or infinity in the loss or a tensor",
    "batch": "a batch whose numbers are far from usual",
    "spike": "a loss, or a norm of all gradients, far above the usual",
    "zero_grad": "gradients are not cleared between two steps",
    "moments": "moments of an optimizer are lost, or 0 although there are gradients",
    "rates": "the learning rate of one group jumps, and those of the others do not",
    "updates": "updates too large or too small, or those of one group change alone",
    "frozen": "a parameter that is to be trained does not change",
    "underflow": "gradients become 0 in float16",
    "loss_scale": "the loss scale collapses",
    "dead": "the output of a module is 0 nearly everywhere",
    "depth": "gradients explode or vanish with depth",
    "drift": "one layer moves away from the others",
    "replicas": "gradients or parameters of two replicas differ",
}
REPLICAS = "replicas"  # over ranks; see replica_watch
