"""The kernel campaign: which operators, how each is built, and how each kind of row is measured."""
