"""Problems, the float64 reference, and what compares a backend with it."""
