"""Work that several processes share and that can be resumed: fingerprints, shares, a pool of Ray actors."""
