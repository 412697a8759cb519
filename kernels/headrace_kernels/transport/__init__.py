"""What carries parcels between the ranks of a group, by where the ranks are, and the choice among them."""
