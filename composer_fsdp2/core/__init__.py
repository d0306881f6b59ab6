"""Planning and applying FSDP2 on any `nn.Module`; knows nothing of Composer."""
