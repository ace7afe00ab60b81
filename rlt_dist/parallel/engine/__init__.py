"""Who updates the parameters, the optimizer's state cut over the data axis: one interface."""
