"""jrl's formulas against plain loops over tokens, and against the functions of libraries that others wrote."""
