"""`rush race`: recipes trained side by side from the same seeds on the same data, to the same loss (docs/race.md)."""
