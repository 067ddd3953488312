"""Component power from simulator traces, after GPUWattch and AccelWattch: files, energies, fits,
figures.
"""
