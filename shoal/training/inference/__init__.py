"""Use of trained models on any layout: generation, evaluation, and conversation."""
