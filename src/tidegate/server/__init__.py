"""The only asyncio: listeners and the loop that performs what the core decided. May import everything."""
