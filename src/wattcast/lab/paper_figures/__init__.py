"""Figures drawn after those of the papers that Wattcast unites."""
