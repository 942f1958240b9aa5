"""Many runs that differ in a few fields: training them (`jrl sweep`) and comparing them (`jrl compare`)."""
