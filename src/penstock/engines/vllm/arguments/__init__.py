"""arguments"""
