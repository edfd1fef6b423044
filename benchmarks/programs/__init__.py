"""Programs as others write them, trained with PyTorch's parts and with ours, and compared after every step."""
