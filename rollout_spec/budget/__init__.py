"""How much of each draft to verify in a step: the decision, and the estimates that it is made from."""
