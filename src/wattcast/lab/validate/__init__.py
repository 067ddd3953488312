"""The accuracy ledger: held-out errors beside trivial floors, published numbers and goals."""
