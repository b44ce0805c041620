"""Products of linear layers in 8 or 4 bits: which layers have them, their codes, products and operators."""
