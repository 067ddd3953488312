"""The command line: one module per group of commands, imported when a verb is typed."""
