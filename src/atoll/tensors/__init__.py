"""Pure functions on tensors: merge rules, the outer step, taking updates, payload codecs."""
