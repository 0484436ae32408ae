"""Programs that show the product at work: `demo` is the one to run first."""
