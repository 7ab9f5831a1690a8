"""What proves a distributed model right: gloo ranks here, plain training as the oracle, weights moved across."""
