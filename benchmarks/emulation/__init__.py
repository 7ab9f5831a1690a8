"""Several hosts on one machine: network namespaces with limited links, and agents that start ranks in them."""
