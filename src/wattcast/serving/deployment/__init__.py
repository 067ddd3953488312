"""Write what a plan is deployed with, and what is expected of it once it runs."""
