"""How ranks were started and where they run: launchers, hosts, network addresses, and the memory allocator."""
