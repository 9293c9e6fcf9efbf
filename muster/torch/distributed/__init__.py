"""The process group of `torch.distributed` with the name ``muster``."""
