"""A page in the browser and an HTTP interface over the same functions as the command line."""
