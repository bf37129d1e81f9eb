/* What nvidia-smi shows, as tables: the full query (XML and text) and the fields of --query-gpu. */
#ifndef GPUFARM_SMI_H
#define GPUFARM_SMI_H

enum {
    ROW_XML_ONLY = 1,   /* not in the text */
    ROW_TEXT_ONLY = 2,  /* not in the XML */
    ROW_HEX = 4,        /* the text puts 0x before it */
    ROW_DEEPER = 8,     /* the text indents it one step more */
    ROW_IF_KNOWN = 16,  /* shown only where the profile has a value */
    ROW_OPTIONAL = 64,  /* a section that is not there where the profile has no value for its first row */
    ROW_TLIMIT = 32,    /* shown unless the model gives plain temperature thresholds instead */
};

/* Written by code of their own. */
enum special { SPECIAL_NONE, SPECIAL_MIG_DEVICES, SPECIAL_SUPPORTED_CLOCKS, SPECIAL_PROCESSES, SPECIAL_ACCOUNTED };

struct row {
    int depth;         /* below <gpu>, from 1 */
    const char *xml;   /* element; the path of elements is the key in the profile */
    const char *label; /* text */
    int flags;
    const char *key; /* where it is not the path; "" marks a section */
    enum special special;
};

struct field {
    const char *name, *alias;
    const char *unit; /* in the header and behind the value; NULL: neither, the value is cut at its unit */
    const char *key;
    const char *prefix;
};

extern const struct row smi_rows[];
extern const struct row smi_mig_rows[];
extern const struct field smi_gpu_fields[];
extern const struct field smi_process_fields[];

#endif
