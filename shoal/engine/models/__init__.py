"""Plain single-device transformers: nothing here knows that training is distributed."""
