/* The WSL node's libdxcore.so: as much of the kernel-mode thunks as NVIDIA's container toolkit calls to find the
 * driver store of the Windows driver (its internal/dxcore). One adapter; its path is the profile's. */
#include "profile.h"

#include <string.h>
#include <wchar.h>

#define API __attribute__((visibility("default")))
#define STATUS_SUCCESS 0
#define STATUS_INVALID_PARAMETER (-1073741811)
#define ADAPTER 0x40000000u
#define WDDM_3_2 3200u
#define MAX_VALUE_NAME 260

enum { QUERY_DRIVER_VERSION = 13, QUERY_REGISTRY = 48 };
enum { REGISTRY_DRIVER_STORE_PATH = 2 };
enum { REGISTRY_SUCCESS = 0, REGISTRY_BUFFER_OVERFLOW = 1 };

struct adapter_info {
    unsigned int adapter;
    struct {
        unsigned int low;
        int high;
    } luid;
    unsigned int sources;
    unsigned int present_move_regions_preferred;
};

struct enum_adapters2 {
    unsigned int count;
    struct adapter_info *adapters;
};

struct enum_adapters3 {
    unsigned long long filter;
    unsigned int count;
    struct adapter_info *adapters;
};

struct query_adapter_info {
    unsigned int adapter;
    unsigned int type;
    void *data;
    unsigned int size;
};

struct registry_info {
    unsigned int query_type;
    unsigned int flags;
    wchar_t value_name[MAX_VALUE_NAME];
    unsigned int value_type;
    unsigned int physical_adapter;
    unsigned int output_size;
    unsigned int status;
    union {
        unsigned long long number;
        wchar_t text;
    } output;
};

static const char *driver_store(void)
{
    const struct sim_profile *profile = sim_load();
    const char *path = sim_node_value(profile, "driver.store_path");

    return sim_is_wsl(profile) && sim_driver_state(profile) == SIM_DRIVER_LOADED ? path : NULL;
}

static int enumerate(unsigned int *count, struct adapter_info *adapters)
{
    if (!driver_store()) {
        *count = 0;
        return STATUS_SUCCESS;
    }
    if (adapters) {
        if (*count < 1)
            return STATUS_INVALID_PARAMETER;
        memset(adapters, 0, sizeof(*adapters));
        adapters->adapter = ADAPTER;
        adapters->luid.low = 0xd1ce;
        adapters->sources = 1;
    }
    *count = 1;
    return STATUS_SUCCESS;
}

API int D3DKMTEnumAdapters2(struct enum_adapters2 *request)
{
    return request ? enumerate(&request->count, request->adapters) : STATUS_INVALID_PARAMETER;
}

API int D3DKMTEnumAdapters3(struct enum_adapters3 *request)
{
    return request ? enumerate(&request->count, request->adapters) : STATUS_INVALID_PARAMETER;
}

API int D3DKMTQueryAdapterInfo(const struct query_adapter_info *request)
{
    struct registry_info *registry;
    const char *path = driver_store();
    size_t length;

    if (!request || request->adapter != ADAPTER || !path)
        return STATUS_INVALID_PARAMETER;
    if (request->type == QUERY_DRIVER_VERSION && request->size >= sizeof(unsigned int)) {
        *(unsigned int *)request->data = WDDM_3_2;
        return STATUS_SUCCESS;
    }
    if (request->type != QUERY_REGISTRY || request->size < sizeof(*registry))
        return STATUS_INVALID_PARAMETER;
    registry = request->data;
    if (registry->query_type != REGISTRY_DRIVER_STORE_PATH)
        return STATUS_INVALID_PARAMETER;
    length = strlen(path);
    if (request->size < sizeof(*registry) + length * sizeof(wchar_t)) {
        /* The first call asks how much room the path takes. */
        registry->output_size = (unsigned int)(length * sizeof(wchar_t));
        registry->status = REGISTRY_BUFFER_OVERFLOW;
        return STATUS_SUCCESS;
    }
    for (size_t i = 0; i < length; i++)
        (&registry->output.text)[i] = (wchar_t)(unsigned char)path[i];
    registry->output_size = (unsigned int)(length * sizeof(wchar_t));
    registry->status = REGISTRY_SUCCESS;
    return STATUS_SUCCESS;
}
