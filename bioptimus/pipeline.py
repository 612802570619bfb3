"""One slide: plan, read, ask the client, write; no threads of its own."""
