"""A facility and what is placed in it, drawn: racks with their power, the fabric, GPUs in their replicas' colours."""
