"""Weight sync: new weights into running servers."""
