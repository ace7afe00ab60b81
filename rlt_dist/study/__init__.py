"""What runs are worth: reports of single runs, and later studies over many."""
