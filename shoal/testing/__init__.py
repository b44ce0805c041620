"""What proves that training is right: comparison with one device, planted faults, and faults injected into runs.

`shoal.testing.verify` compares losses, gradients and weights of any layout with a plain model on one device;
`shoal.testing.chaos` kills ranks of a run and checks that nothing is lost. It uses the wings up to `shoal.launch`.
"""
