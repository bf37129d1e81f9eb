/* What the two halves of the CUDA double share. */
#ifndef GPUFARM_CUDA_H
#define GPUFARM_CUDA_H

#include "profile.h"

#define API __attribute__((visibility("default")))

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_INVALID_PTX = 218,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_SYSTEM_NOT_READY = 802,
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
    CUDA_ERROR_UNKNOWN = 999,
};

struct cuda_device {
    char name[128];
    char uuid[96];
    char gpu_uuid[96]; /* of the whole GPU, whose data are read again whenever a fault could be there */
    char compute_cap[16];
    double memory_mib;
    double share; /* of the GPU's memory, and so of its bandwidth */
    int sm_count;
    bool mig;
};

/* Whether this very process called cuInit. */
bool cuda_initialised(void);

/* The device that a process knows by this number; NULL, and an error, where there is none. */
const struct cuda_device *device_at(int ordinal, int *error);

#endif
