"""How a replica is reached, by gateways and by batch: its address, one connection, the link."""
