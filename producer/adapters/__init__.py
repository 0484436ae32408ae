"""What other agent projects plug in, each a thin translation to this queue; none is imported before it is used."""
