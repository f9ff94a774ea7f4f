"""forkyard for other frameworks. Each module needs its framework; none of them is imported by the rest."""
