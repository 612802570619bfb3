"""``make bench``: every figure of docs/performance.md that this machine can give, in one run."""

from benchmarks import client, end_to_end, reading, start_up

print("# Asking the model: CPU a tile")
client.main()
print("\n# Reading alone")
reading.main([])
print("\n# From the command to the first tile")
start_up.main([])
print("\n# Slides to files")
end_to_end.main([])
