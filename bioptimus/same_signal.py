"""When a SIGTERM is the one before told twice; loaded before anything else, by the command too."""

# GNU timeout tells its child, and then the child's group: the child hears one SIGTERM twice, a few
# microseconds apart. What comes within this time is no second one.
SAME_SIGNAL_S = 0.1
