"""What a technique is, and what techniques share: contract, evidence, replacing modules, tolerances."""
