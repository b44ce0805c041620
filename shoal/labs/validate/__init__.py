"""The cost model beside published measurements."""
