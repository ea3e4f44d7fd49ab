"""What there is to place on: sites, racks, power, GPUs and the fabric between them."""
