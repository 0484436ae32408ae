"""A page with a switch and a Save button, and the tiny checkpoint that knows it: read `page` first."""
