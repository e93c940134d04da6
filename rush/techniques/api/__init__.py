"""What a technique is, and what techniques share: the contract, evidence, seams of the model, tolerances."""
