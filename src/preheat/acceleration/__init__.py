"""Makes things hot: weights in memory, verified. Knows no replica, gateway or fleet."""
