"""What every other package leans on: errors, units, number formats, strict readers, measured rows."""
