"""Models of one's own: any ``nn.Module``, its loss and its samples."""
