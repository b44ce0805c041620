"""Context parallelism: sequences are split over ranks, and attention spans all parts."""
