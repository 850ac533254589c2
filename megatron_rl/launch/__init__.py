"""Starting and ending ranks: torchrun, watchdog, signals, exit codes."""
